//! Finds stop strings in streamed text, even if they span several tokens.

/// A filter that ends streamed text at the first stop string. Holds back text that may be the start of a stop string.
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    /// The index of the stop string that was found.
    found: Option<usize>,
}

impl StopStrings {
    /// Creates a filter for `stops`. Ignores empty strings, which would match immediately.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new(), found: None }
    }

    /// Returns whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.found.is_some()
    }

    /// Returns the stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.stops.get(self.found?).map(String::as_str)
    }

    /// Adds a piece of text. Returns all pending text that can no longer be part of a stop string.
    ///
    /// Never returns the stop string or any text after it.
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        let places =
            self.stops.iter().enumerate().filter_map(|(index, stop)| Some((self.held.find(stop.as_str())?, index)));
        if let Some((at, index)) = places.min() {
            self.found = Some(index);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let prefix_bytes = self.stops.iter().map(|stop| longest_prefix_at_end(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - prefix_bytes);
        std::mem::replace(&mut self.held, held)
    }

    /// Ends the stream. Returns any text that is still held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the length in bytes of the longest proper prefix of `stop` that `text` ends with.
fn longest_prefix_at_end(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).skip(1);
    ends.filter(|&end| text.ends_with(&stop[..end])).max().unwrap_or(0)
}
