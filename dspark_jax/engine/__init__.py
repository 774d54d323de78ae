"""The engine: requests, scheduler, compiled steps and the loop that drives them."""
