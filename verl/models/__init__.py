"""Everything about one transformer: what it is, how it is loaded and sharded, read, trained and written."""
