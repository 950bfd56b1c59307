"""What single settings of the queue do: one change at a time, on a whole fleet."""
