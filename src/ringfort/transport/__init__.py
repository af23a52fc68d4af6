"""Links between two processes: frames and their matching (pure), the engine that moves them, and the streams below."""
