"""An agent that reads contracts with ten small models; README.md says how to run it."""
