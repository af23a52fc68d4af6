"""How peers find each other: addresses come in from several sources, and nothing is trusted."""
