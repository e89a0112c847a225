"""Conversations: environments and tools, the processes that run them, and the bridges between turns."""
