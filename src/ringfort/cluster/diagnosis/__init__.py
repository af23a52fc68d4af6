"""What keeps a machine from its cluster, and in which words to say so."""
