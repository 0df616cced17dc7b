"""Linear models of other libraries computed by tarnn's ops."""
