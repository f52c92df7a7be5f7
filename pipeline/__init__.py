"""Pipeline schedules, their validation and the engine that runs them."""
