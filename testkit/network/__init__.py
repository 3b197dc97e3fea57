"""Networks on one machine: slow ones, faulty ones, and a home of several machines."""
