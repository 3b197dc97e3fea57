"""The writing of one reply: its plan, and the loop."""
