"""One run of anything: what training and evaluation set up alike, and what every run leaves behind."""
