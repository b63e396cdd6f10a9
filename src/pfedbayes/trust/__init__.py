"""Trust in predictions: calibration, prediction sets, abstention, out-of-distribution inputs, certificates."""
