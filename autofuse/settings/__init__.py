"""Settings: what may be set, in the environment and as attributes of `config`."""
