"""How far predictions can be trusted: calibration, prediction sets, abstention, certificates."""
