"""The runtime for files: pictures, documents, sounds, and files of any kind."""
