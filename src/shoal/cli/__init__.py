"""The command line: wires the parts together; nothing imports it."""
