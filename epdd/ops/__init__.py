"""What operators see: metrics, status, the request log, the admin socket, the terminal."""
