"""Whether a configuration can work, said before anything is started."""
