"""What one worker takes: encoding, decoding, loading, handing over."""
