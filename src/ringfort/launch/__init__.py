"""What `ringfort run` does: launchers that agree on ranks and on an end, each with the ranks of its machine."""
