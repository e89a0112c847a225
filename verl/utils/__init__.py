"""What every floor may use: files that are whole or not there, and state as JSON."""
