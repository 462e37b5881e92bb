"""What a program runs in which dtype: `jmpx.inspect.audit`."""
