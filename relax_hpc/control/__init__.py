"""Who is alive, where, in which incarnation and how far: messages, registry, heartbeats, journal."""
