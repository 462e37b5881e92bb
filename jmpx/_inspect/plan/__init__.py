"""`plan`: what each policy costs on a chip, before the chip is rented."""
