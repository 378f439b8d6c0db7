"""Parts of the residency benchmark."""
