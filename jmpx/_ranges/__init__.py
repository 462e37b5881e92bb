"""The ranges of a train step: `jmpx.ranges`."""
