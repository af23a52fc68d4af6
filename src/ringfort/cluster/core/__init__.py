"""What a peer of a cluster decides. Pure: events and time in, instructions out."""
