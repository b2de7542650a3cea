"""Comparing mathematical answers: functions of two texts."""
