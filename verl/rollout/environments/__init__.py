"""Conversations with environments and tools, which run in their own processes."""
