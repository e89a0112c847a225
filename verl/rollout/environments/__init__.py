"""Conversations with environments and tools that run in separate processes."""
