"""The ranges of a train step: `jmpx.inspect.ranges`."""
