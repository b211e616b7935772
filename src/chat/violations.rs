//! Counts how often and in which way a model violates its chat format.

/// A way in which a model violates its chat format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatViolation {
    /// A control token in a place where harmony does not allow it. Not counted in output with tags.
    UnexpectedToken,
    /// A control token or a tag is missing.
    MissingToken,
    /// The header of a message has no channel, an unknown channel, or a role that the format does not allow there.
    InvalidHeader,
    /// The parser cannot read a tool call, for example because its JSON is invalid or it has no name.
    /// Not counted in harmony, whose parser does not check the arguments.
    InvalidToolCall,
}

impl FormatViolation {
    pub const ALL: [Self; 4] = [Self::UnexpectedToken, Self::MissingToken, Self::InvalidHeader, Self::InvalidToolCall];

    /// Returns the name of this violation in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::UnexpectedToken => "unexpected_token",
            Self::MissingToken => "missing_token",
            Self::InvalidHeader => "invalid_header",
            Self::InvalidToolCall => "invalid_tool_call",
        }
    }
}

/// The number of violations of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatViolations([usize; FormatViolation::ALL.len()]);

impl FormatViolations {
    pub fn add(&mut self, kind: FormatViolation) {
        self.0[kind as usize] += 1;
    }

    /// Counts a violation of the kind `kind` if `is_violated` is true.
    pub fn add_if(&mut self, is_violated: bool, kind: FormatViolation) {
        self.0[kind as usize] += usize::from(is_violated);
    }

    /// Returns the number of violations of one kind.
    pub fn of(&self, kind: FormatViolation) -> usize {
        self.0[kind as usize]
    }

    /// Returns the number of violations of all kinds.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}
