"""The forms in which work travels between processes. Sans-io: bytes in, values out."""
