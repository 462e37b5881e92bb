"""What a program ran in which dtype; `jmpx.audit`."""
