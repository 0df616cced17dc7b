"""Laws that every language model keeps, checked by running one: `tarnn.check`, `tarnn check FOLDER`."""
