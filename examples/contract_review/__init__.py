"""An agent that reads contracts with twelve small models; README.md says how to run it."""
