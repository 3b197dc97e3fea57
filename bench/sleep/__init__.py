"""Machines that fall asleep, lose their network, or come back elsewhere, and are woken up."""
