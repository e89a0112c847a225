"""The places of a step that a study may change."""
