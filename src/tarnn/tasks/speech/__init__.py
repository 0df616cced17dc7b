"""Speech: the letters of recordings, by CTC; wav files, transcripts, and what a model of them hears."""
