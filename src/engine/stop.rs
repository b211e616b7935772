//! Stop strings in a stream of text, across the borders of tokens.

/// Lets text through until a stop string is complete; holds back what may become one.
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    hit: bool,
}

impl StopStrings {
    /// Empty strings are ignored: they would stop everything at once.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new(), hit: false }
    }

    /// Whether a stop string has been completed.
    pub fn hit(&self) -> bool {
        self.hit
    }

    /// The part of what came so far that may be shown. Nothing comes after a hit; the stop string itself never does.
    pub fn push(&mut self, text: &str) -> String {
        if self.hit {
            return String::new();
        }
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.hit = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self.stops.iter().map(|stop| longest_start_at_end(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// What is still held back, at the end of the text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length in bytes of the longest proper start of `stop` that `text` ends with.
fn longest_start_at_end(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).skip(1);
    ends.filter(|&end| text.ends_with(&stop[..end])).max().unwrap_or(0)
}
