"""Plan: step time, memory, money and dates before a GPU is booked. Pure Python, no torch."""
