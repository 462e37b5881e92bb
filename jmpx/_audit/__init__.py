"""What an audit reads from a traced program, and how it reports that."""
