//! [`StopFilter`]: ends streamed text at the first stop string, even if it spans several tokens.

/// A filter that ends streamed text at the first stop string. It holds back text that may begin a stop string.
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
    /// The number of bytes at the start of `held` in which a stop string can begin, but must not end.
    /// See [`push_unsearched`](Self::push_unsearched).
    unsearched: usize,
    /// The index in `stops` of the stop string that was found.
    found: Option<usize>,
}

impl StopFilter {
    /// Creates a filter for `stops`. Ignores empty strings, which would match before the first character.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new(), unsearched: 0, found: None }
    }

    pub fn is_stopped(&self) -> bool {
        self.found.is_some()
    }

    /// Returns the stop string that ended the text, or `None` if no stop string was found.
    pub fn found(&self) -> Option<&str> {
        self.stops.get(self.found?).map(String::as_str)
    }

    /// Adds a piece of text. Returns the text, held back or new, that cannot be part of a stop string.
    ///
    /// Once a stop string is found, returns only the text before it. Later calls return nothing.
    /// If the new text completes several stop strings, the one that begins first counts.
    /// Stop strings that end in unsearched text do not count. See [`push_unsearched`](Self::push_unsearched).
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        let places = self.stops.iter().enumerate().filter_map(|(index, stop)| Some((self.find(stop)?, index)));
        if let Some((at, index)) = places.min() {
            self.found = Some(index);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        self.release()
    }

    /// Adds a piece of text, and ignores stop strings that end in it.
    /// Returns the text, held back or new, that cannot be part of a stop string.
    ///
    /// A stop string that ends in a later piece can begin in this piece.
    pub fn push_unsearched(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        self.unsearched = self.held.len();
        self.release()
    }

    /// Returns the byte index in `held` of the first occurrence of `stop` that ends after the unsearched text.
    fn find(&self, stop: &str) -> Option<usize> {
        let first = (self.unsearched + 1).saturating_sub(stop.len());
        let first = (first..=self.held.len()).find(|&at| self.held.is_char_boundary(at))?;
        Some(first + self.held[first..].find(stop)?)
    }

    /// Removes and returns the held-back text, except for the end if it may begin a stop string.
    fn release(&mut self) -> String {
        let prefix_bytes = self.stops.iter().map(|stop| longest_prefix_at_end(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - prefix_bytes);
        let released = std::mem::replace(&mut self.held, held);
        self.unsearched = self.unsearched.saturating_sub(released.len());
        released
    }

    /// Removes and returns the text that is still held back.
    /// More text can follow, for example after a message on another channel.
    /// Stop strings that would begin before this call and end after it do not count.
    pub fn finish(&mut self) -> String {
        self.unsearched = 0;
        std::mem::take(&mut self.held)
    }
}

/// Returns the length in bytes of the longest proper prefix of `stop` that is a suffix of `text`.
fn longest_prefix_at_end(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).skip(1);
    ends.filter(|&end| text.ends_with(&stop[..end])).max().unwrap_or(0)
}
