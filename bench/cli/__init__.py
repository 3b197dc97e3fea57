"""What people type, and how long it takes."""
