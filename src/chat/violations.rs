//! Counts how often and in which way a model violates its chat format.

/// A kind of chat format violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatViolation {
    /// A repeated or misplaced control token, such as a second `<|message|>`.
    /// Counted only in harmony, and not for tokens that end a message.
    UnexpectedToken,
    /// A missing control token or tag.
    MissingToken,
    /// A harmony header without a channel, with an unknown channel, or with a role that is not allowed there.
    InvalidHeader,
    /// A tool call that cannot be parsed, for example because its JSON is invalid or contains no function name.
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

    /// Adds one violation of `kind` if `is_violated` is true.
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
