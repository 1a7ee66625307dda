"""epdctl: looks at and steers a running daemon."""
