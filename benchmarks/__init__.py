"""What the speed of accel_ops is measured with: the rows, the libraries, the comparison."""
