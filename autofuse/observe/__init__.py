"""Looking on: counters, events, check mode, explanations. No stage imports it but by an event."""
