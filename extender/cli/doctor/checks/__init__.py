"""The checks of the doctor: pure functions over facts."""
