"""Parts that several test files share."""
