"""Which image goes to which encoder, and when.  Pure: numbers and a `now` in, decisions out."""
