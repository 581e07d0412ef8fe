"""Who is alive, where and how far: messages, registry, heartbeats, journal."""
