"""An agent that reads contracts with eleven small models; README.md says how to run it."""
