"""Methods on real tables whose clients are real: hospitals, schools, regions, people."""
